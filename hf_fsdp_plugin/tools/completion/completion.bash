#compdef hf-fsdp
_hf_fsdp() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"
  local flags="" valued="" positional="" values="" files="" script=0 i word
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "@VERBS@ --help --version" -- "$cur"))
    return
  fi
  case "${COMP_WORDS[1]}" in
@CASES@
  esac
  if ((script)); then
    for ((i = 2; i < COMP_CWORD; i++)); do
      word="${COMP_WORDS[i]}"
      if [[ $word != -* ]]; then  # the script: its arguments are its own
        COMPREPLY=($(compgen -f -- "$cur"))
        return
      fi
      [[ " $valued " == *" ${word//_/-} "* ]] && ((i++))
    done
  fi
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
  elif [[ -z $files && $cur == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  elif [[ -z $files && -n $positional ]]; then
    COMPREPLY=($(compgen -W "$positional" -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}
if [[ -z ${ZSH_VERSION-} ]]; then
  complete -o filenames -F _hf_fsdp hf-fsdp
else
  autoload -U bashcompinit && bashcompinit
  if [[ ${funcstack[1]} == _hf-fsdp ]]; then
    _bash_complete -o filenames -F _hf_fsdp
  else
    complete -o filenames -F _hf_fsdp hf-fsdp
  fi
fi
